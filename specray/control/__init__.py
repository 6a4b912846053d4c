"""How much to speculate, decided from measurements. Pure: no I/O and no clock."""
