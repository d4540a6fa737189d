"""What a checkpoint holds and how its weights are stored, with the evidence."""
