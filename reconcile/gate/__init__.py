"""What a run must have done to count, and what was accepted, kept and merged before."""
