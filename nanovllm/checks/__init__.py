"""What a person may pass: values, options, their names, requests. Checked once, at the boundary."""
