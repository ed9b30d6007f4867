"""`ppsd-run watch`: an answer is recorded, then shown slowly: stages, drafts in flight, verdicts, roll-backs."""
