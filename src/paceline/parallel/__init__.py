"""Layer 5: a layout applied to a model: who holds which part of it, and what ranks of one worker exchange."""
