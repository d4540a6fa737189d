"""What is judged: one folder per backend."""
