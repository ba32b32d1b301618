"""How good features are: kernel error, linear probe, clustering."""
