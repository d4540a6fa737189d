"""The two halves of a run: what will be captured, and the capturing."""
