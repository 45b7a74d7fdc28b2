"""modelexport.json: its typed reader, and its rows."""
