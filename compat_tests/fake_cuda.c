/* A CUDA runtime that launches nothing: what an exported kernel of the CuTe DSL would have launched is written down.

   Linked in place of the DSL's runtime. Records the last launch: grid, block, dynamic shared memory, the cluster, and
   the bytes of each argument (a TMA descriptor has 128). */

#include <stdint.h>
#include <string.h>

typedef struct { uint32_t x, y, z; } Dim3;
typedef struct { int id; char pad[4]; union { char bytes[64]; Dim3 cluster; } value; } Attribute;
typedef struct {
    Dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    Attribute *attributes;
    unsigned number_of_attributes;
} Config;

enum { ARGUMENTS = 32, ARGUMENT_BYTES = 128, CLUSTER_DIMENSION = 4 };

int fake_launches;
Dim3 fake_grid, fake_block, fake_cluster;
uint64_t fake_shared_bytes, fake_stream;
int fake_argument_bytes[ARGUMENTS]; /* set by the test, which knows the kernel */
char fake_argument[ARGUMENTS][ARGUMENT_BYTES];

int _cudaLaunchKernelEx(const Config *config, void *kernel, void **arguments) {
    (void)kernel;
    fake_launches++;
    fake_grid = config->grid;
    fake_block = config->block;
    fake_shared_bytes = config->shared_bytes;
    fake_stream = (uint64_t)config->stream;
    memset(&fake_cluster, 0, sizeof fake_cluster);
    for (unsigned i = 0; i < config->number_of_attributes; i++)
        if (config->attributes[i].id == CLUSTER_DIMENSION) fake_cluster = config->attributes[i].value.cluster;
    for (int i = 0; i < ARGUMENTS && fake_argument_bytes[i]; i++)
        memcpy(fake_argument[i], arguments[i], fake_argument_bytes[i]);
    return 0;
}

static int device;
int _cudaGetDevice(int *found) { *found = device; return 0; }
int _cudaSetDevice(int wanted) { device = wanted; return 0; }
int _cudaDeviceGetAttribute(int *value, int attribute, int of) { (void)attribute, (void)of; *value = 232448; return 0; }
int _cudaLibraryLoadData() { return 0; }
int _cudaLibraryGetKernel() { return 0; }
int _cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int _cudaFuncSetAttribute() { return 0; }
int _cudaKernelSetAttributeForDevice() { return 0; }
int cuda_dialect_init_library_once() { return 0; }
void cuda_dialect_unload_library_once() {}
int CuteDSLRT_TVMFFISetRaisedCudaError() { return -1; }
