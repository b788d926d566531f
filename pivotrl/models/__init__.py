"""One file a model family: Hugging Face config -> megatron-core settings, and a declarative tensor mapping."""
