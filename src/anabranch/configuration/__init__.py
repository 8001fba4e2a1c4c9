"""Settings from the environment and the configuration file, validated."""
