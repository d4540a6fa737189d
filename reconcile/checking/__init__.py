"""One kernel by itself: probes, and what they say."""
