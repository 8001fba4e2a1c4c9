"""What the river runs on: settings, the way out, telemetry."""
