"""A small, real inference server: Llama-family forward pass, paged decisions, honest stamps."""
