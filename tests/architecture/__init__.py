"""Who may import whom, and the rules that each file keeps."""
