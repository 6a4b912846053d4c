"""Latent attention (MLA): its sizes, its projections, and how they are built."""
