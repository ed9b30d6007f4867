"""Models: configuration, module tree, exit heads, checkpoints, GGUF import, tokenizers, chat templates, model names."""
