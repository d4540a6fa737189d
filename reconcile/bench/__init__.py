"""Times of a kernel beside torch's, and what follows from them."""
