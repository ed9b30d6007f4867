"""What a pipeline runs: schedules, stop rules, rounds; where layers go, what drafts cost, what `auto` has learned."""
