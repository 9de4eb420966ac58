"""What users call: building fusions and running them."""
