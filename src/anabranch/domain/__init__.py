"""The words of the system: values, events, errors and contracts, with no framework behind them."""
