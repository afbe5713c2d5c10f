"""The admin API, served by a process of its own: a gateway does not import it, since SQLAlchemy would cost each 15 MB."""
