"""A verdict after each save."""
