"""Shared by the tests: small models and runs, commands, reference computations."""
