"""Error statistics, limits and the number formats that they are about."""
