"""A front: who has asked and what is committed live in one process, engines in others, which may be lost."""
