"""Forecasts of `llmnode plan` against what sessions then take."""
