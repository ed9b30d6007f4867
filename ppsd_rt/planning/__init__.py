"""What stages cost, what schedules bring: measured, simulated, in closed form."""
