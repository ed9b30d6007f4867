"""`ppsd-run serve`: an OpenAI-compatible HTTP server on one engine. Needs the extra `[serve]`."""
