"""Why it is wrong: faults with free parameters, fitted to a failing row and ranked."""
