KEY="plugins.grouped_gradient"
SETTINGS=()
def check(c): return True
