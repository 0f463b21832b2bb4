"""Layer 4: codecs, which make what is exchanged smaller."""
