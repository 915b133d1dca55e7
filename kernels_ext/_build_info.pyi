"""What the build wrote down about itself (CMakeLists.txt makes the file)."""

CUDA_BUILT: bool
CUDA_REASON: str  # the compiler and architectures if CUDA_BUILT, else why not
COMPILER: str
BUILD_TYPE: str
TORCH_VERSION: str
