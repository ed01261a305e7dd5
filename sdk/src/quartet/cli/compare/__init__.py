"""`quartet compare`: runs beside each other, from what their output folders have."""
