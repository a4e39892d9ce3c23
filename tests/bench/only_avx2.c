// Preloaded into a program, shows it a CPU of x86-64-v3: AVX2, no AVX-512, no VNNI, no AMX.
//
// Programs choose their kernels by what the instruction CPUID tells. Linux can have it raise a fault
// instead (arch_prctl(2), ARCH_SET_CPUID), and the handler here answers in its place: what the CPU
// says, less what is to be hidden. Threads inherit the fault and exec ends it; the programs that a
// program starts are held by LD_PRELOAD, as it was. One that handles SIGSEGV itself is not for this.

#define _GNU_SOURCE
#include <cpuid.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(index) (1u << (index))

struct answer {
    unsigned eax, ebx, ecx, edx;
};

static long let_cpuid_answer(int whether) {
    return syscall(SYS_arch_prctl, ARCH_SET_CPUID, (unsigned long)whether);
}

// Leaves and bits: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID.
static void hide(unsigned leaf, unsigned subleaf, struct answer *told) {
    if (leaf == 7 && subleaf == 0) {
        // AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL
        told->ebx &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        // AVX-512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
        told->ecx &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        // AVX-512 4VNNIW, 4FMAPS, VP2INTERSECT; AMX-BF16; AVX-512 FP16; AMX-TILE, AMX-INT8
        told->edx &= ~(BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25));
    } else if (leaf == 7 && subleaf == 1) {
        // AVX-VNNI, AVX-512 BF16, AMX-FP16, AVX-IFMA
        told->eax &= ~(BIT(4) | BIT(5) | BIT(21) | BIT(23));
        // AVX-VNNI-INT8, AVX-NE-CONVERT, AMX-COMPLEX, AVX-VNNI-INT16, AVX10
        told->edx &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));
    } else if (leaf == 0xd && subleaf == 0) {
        told->eax &= ~(BIT(5) | BIT(6) | BIT(7) | BIT(17) | BIT(18));  // registers of AVX-512, AMX
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {
        *told = (struct answer){0};  // AMX's tiles and products, AVX10
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)registers[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0xa2) {
        signal(number, SIG_DFL);  // not CPUID: the program's own fault, which ends it as it returns
        return;
    }
    const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
    struct answer told;
    let_cpuid_answer(1);
    __cpuid_count(leaf, subleaf, told.eax, told.ebx, told.ecx, told.edx);
    let_cpuid_answer(0);
    hide(leaf, subleaf, &told);
    registers[REG_RAX] = told.eax;
    registers[REG_RBX] = told.ebx;
    registers[REG_RCX] = told.ecx;
    registers[REG_RDX] = told.edx;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    if (sigaction(SIGSEGV, &action, NULL) != 0 || let_cpuid_answer(0) != 0) {
        fprintf(stderr, "this machine cannot hide what its CPU has: %s\n", strerror(errno));
        _exit(71);
    }
}
