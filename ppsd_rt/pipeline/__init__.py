"""What a pipeline runs: schedules, stop rules, rounds."""
