"""The methods, one folder each; a method never imports another."""
