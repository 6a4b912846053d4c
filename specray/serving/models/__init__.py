"""Several models behind one address: which are loaded, who decides it, and who is asked for each call."""
