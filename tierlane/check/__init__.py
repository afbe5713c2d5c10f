"""`tierlane check`: whether what Tierlane stands on does what it must, before traffic finds out."""
