"""Tables, heat maps and plots."""
