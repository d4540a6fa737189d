"""What is right: number formats, checkpoints, and reference models."""
