"""Training of LLaMA models: from scratch, continued, and with adapters."""
