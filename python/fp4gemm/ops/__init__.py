"""The torch operators: schema (their parameters), fakes (shapes for tracers), operators (themselves)."""
