"""Updates roles on a backbone: optimizer, schedule, accumulation."""
