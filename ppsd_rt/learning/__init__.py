"""What is kept of answers where a user wants that, and heads that learn from it while the engine is idle."""
