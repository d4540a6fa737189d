"""What is captured: hooks, traces, and declared maps between the names of two traces."""
