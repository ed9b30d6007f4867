"""Where layers go, what drafts cost and bring, and what `auto` has learned."""
