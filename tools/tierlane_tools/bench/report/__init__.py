"""The result of a run: verdict, document and tables."""
