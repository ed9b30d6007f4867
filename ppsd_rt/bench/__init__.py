"""Tools of whoever works on the runtime: measuring, proving, simulating, showing. The product imports none of it."""
