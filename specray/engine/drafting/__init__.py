"""The draft engine, and what grows in it: chains, trees, outcome branches, guesses."""
