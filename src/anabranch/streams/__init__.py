"""Many producers, one ordered stream: the log, its readers and the coordinator of planner steps."""
