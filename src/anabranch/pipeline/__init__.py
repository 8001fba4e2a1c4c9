"""The river: stages as functions of values, the order of them, and the Run that owns one execution."""
