"""Workers of Baton: the models they serve, how an engine is started, how it is kept on its own cores."""
