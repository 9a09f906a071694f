def register():
    raise NotImplementedError
