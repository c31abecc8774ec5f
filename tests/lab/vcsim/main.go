// A vSphere server for the tests: VMware's own simulator (govmomi), with what a test has to be able to do to
// a server. One command a line on standard input, one answer a line on standard output:
//
//	at METHOD hold|stall|drop|fail|after-hold|after-drop [BYTES or FAULT]
//	        what happens, once, to the next call of METHOD (PUT and GET: a file of a datastore). hold waits
//	        for "go"; stall gives a task that never ends; fail a task (or a call) with that fault; drop cuts
//	        the connection; after-: once the call was carried out. PUT and GET do it after so many bytes.
//	go      what is held goes on
//	logout  all sessions end
//	forget  the file service no longer knows the sessions, although they go on
//	down    nobody listens and all sessions end, as when the host's services restart; VMs live on
//	up      it listens again, on the same port
//	poweroff NAME
//	        the guest of each VM whose name begins so has powered off by itself
//
// The end of standard input ends the simulator, so that none outlives its test.
package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"flag"
	"fmt"
	"io/ioutil"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/signal"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/types"
)

type event struct{ action, argument string }

var (
	mutex    sync.Mutex
	events   = map[string]event{}
	sessions = map[string]bool{}
	gate     = make(chan bool)
	method   = regexp.MustCompile(`:Body[^>]*>\s*<(\w+)`)
	this     = regexp.MustCompile(`<_this[^>]* type="(\w+)"[^>]*>([^<]+)<`)
)

const envelope = `<?xml version="1.0"?><e:Envelope xmlns:e="http://schemas.xmlsoap.org/soap/envelope/" ` +
	`xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><e:Body>%s</e:Body></e:Envelope>`

func say(words ...interface{}) { fmt.Println(words...) }

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func act(name, action string) {
	say("reached", name)
	switch action {
	case "hold":
		<-gate
	case "drop":
		panic(http.ErrAbortHandler)
	}
}

// counted does something when so many bytes have gone through it, in either direction.
type counted struct {
	http.ResponseWriter
	body interface{ Read([]byte) (int, error) }
	left int
	then func()
}

func (c *counted) pass(n int) int {
	if c.then != nil && n >= c.left {
		return c.left
	}
	return n
}

func (c *counted) passed(n int) {
	if c.left -= n; c.left <= 0 && c.then != nil {
		then := c.then
		c.then = nil
		if f, ok := c.ResponseWriter.(http.Flusher); ok && c.body == nil {
			f.Flush()
		}
		then()
	}
}

func (c *counted) Read(data []byte) (int, error) {
	n, err := c.body.Read(data[:c.pass(len(data))])
	c.passed(n)
	return n, err
}

func (c *counted) Close() error { return nil }

func (c *counted) Write(data []byte) (int, error) {
	written := 0
	for written < len(data) {
		n, err := c.ResponseWriter.Write(data[written : written+c.pass(len(data)-written)])
		written += n
		if err != nil {
			return written, err
		}
		c.passed(n)
	}
	return written, nil
}

func take(name string) event {
	mutex.Lock()
	defer mutex.Unlock()
	found := events[name]
	delete(events, name)
	return found
}

func files(mux http.Handler, w http.ResponseWriter, r *http.Request) {
	cookie, err := r.Cookie("vmware_soap_session")
	mutex.Lock()
	known := err == nil && sessions[cookie.Value]
	mutex.Unlock()
	if !known {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	e := take(r.Method)
	if e.action == "fail" {
		say("reached", r.Method)
		status, _ := strconv.Atoi(e.argument)
		w.WriteHeader(status)
		return
	}
	if e.action != "" {
		left, _ := strconv.Atoi(e.argument)
		c := &counted{ResponseWriter: w, left: left, then: func() { act(r.Method, e.action) }}
		if r.Method == http.MethodPut {
			c.body, r.Body = r.Body, c
		} else {
			w = c
		}
	}
	mux.ServeHTTP(w, r)
}

func made(name string) types.BaseMethodFault {
	kind, ok := types.TypeFunc()(name)
	if !ok {
		log.Fatal("no such fault: ", name)
	}
	fault := reflect.New(kind)
	fill(fault.Elem(), "")
	return fault.Interface().(types.BaseMethodFault)
}

// fill names an object wherever a fault must name one: no server leaves that empty.
func fill(value reflect.Value, name string) {
	if ref, ok := value.Addr().Interface().(*types.ManagedObjectReference); ok {
		*ref = types.ManagedObjectReference{Type: "Folder", Value: "folder-0"}
		if name == "Host" {
			*ref = types.ManagedObjectReference{Type: "HostSystem", Value: "host-0"}
		}
	} else if value.Kind() == reflect.Struct {
		for i := 0; i < value.NumField(); i++ {
			fill(value.Field(i), value.Type().Field(i).Name)
		}
	}
}

func calls(mux http.Handler, w http.ResponseWriter, r *http.Request) {
	body, _ := ioutil.ReadAll(r.Body)
	r.Body = ioutil.NopCloser(bytes.NewReader(body))
	name := ""
	if found := method.FindSubmatch(body); found != nil {
		name = string(found[1])
	}
	e := take(name)
	switch e.action {
	case "hold", "drop":
		act(name, e.action)
	case "fail", "stall":
		say("reached", name)
		object := this.FindSubmatch(body)
		ref := types.ManagedObjectReference{Type: string(object[1]), Value: string(object[2])}
		if !strings.HasSuffix(name, "_Task") {
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprintf(w, envelope, fmt.Sprintf(`<e:Fault><faultcode>ServerFaultCode</faultcode><faultstring>as told`+
				`</faultstring><detail><%[1]sFault xmlns="urn:vim25" xsi:type="%[1]s"/></detail></e:Fault>`, e.argument))
			return
		}
		task := simulator.CreateTask(ref, name, func(*simulator.Task) (types.AnyType, types.BaseMethodFault) {
			return nil, made(e.argument)
		})
		if e.action == "fail" {
			task.Run()
		}
		fmt.Fprintf(w, envelope, fmt.Sprintf(`<%[1]sResponse xmlns="urn:vim25"><returnval type="Task">%[2]s`+
			`</returnval></%[1]sResponse>`, name, task.Self.Value))
		return
	}
	mux.ServeHTTP(w, r)
	if name == "Login" {
		for _, cookie := range (&http.Response{Header: w.Header()}).Cookies() {
			mutex.Lock()
			sessions[cookie.Value] = true
			mutex.Unlock()
		}
	}
	if strings.HasPrefix(e.action, "after-") {
		act(name, e.action[len("after-"):])
	}
}

func logout() {
	mutex.Lock()
	defer mutex.Unlock()
	for key := range sessions {
		context := &simulator.Context{Context: context.Background(), Session: &simulator.Session{}}
		simulator.Map.SessionManager().TerminateSession(context, &types.TerminateSession{SessionId: []string{key}})
	}
	sessions = map[string]bool{}
}

func powerOff(name string) {
	for _, entity := range simulator.Map.All("VirtualMachine") {
		if vm := entity.(*simulator.VirtualMachine); strings.HasPrefix(vm.Name, name) {
			off := types.VirtualMachinePowerStatePoweredOff
			simulator.Map.Update(vm, []types.PropertyChange{
				{Name: "runtime.powerState", Val: off}, {Name: "summary.runtime.powerState", Val: off},
			})
		}
	}
}

// certificate reads the server's certificate and key, and makes them where they are not there yet.
func certificate(path string) tls.Certificate {
	if found, err := tls.LoadX509KeyPair(path, path); err == nil {
		return found
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      pkix.Name{CommonName: "simulated vSphere"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		IPAddresses:  []net.IP{net.ParseIP("127.0.0.1")},
		DNSNames:     []string{"localhost"},
		IsCA:         true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(err)
	secret, err := x509.MarshalECPrivateKey(key)
	must(err)
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	text = append(text, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: secret})...)
	must(ioutil.WriteFile(path, text, 0644))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func main() {
	kind := flag.String("model", "esx", "esx or vpx")
	listen := flag.String("listen", "127.0.0.1:0", "where to listen")
	pem := flag.String("certificate", "", "where its certificate and key are, or are to be")
	flag.Parse()
	model := simulator.ESX()
	if *kind == "vpx" {
		model = simulator.VPX()
	}
	model.Machine = 1
	must(model.Create())
	model.Service.TLS = new(tls.Config)
	model.Service.Listen = &url.URL{Host: "127.0.0.1:0", User: url.UserPassword(os.Getenv("VCSIM_USER"), os.Getenv("VCSIM_PASSWORD"))}
	inner := model.Service.NewServer() // its own listener is not used: the handlers are

	mux := inner.Config.Handler
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/folder/") {
			files(mux, w, r)
		} else {
			calls(mux, w, r)
		}
	})
	tlsConfig := &tls.Config{Certificates: []tls.Certificate{certificate(*pem)}}
	var server *http.Server
	up := func() {
		listener, err := net.Listen("tcp", *listen)
		must(err)
		*listen = listener.Addr().String()
		server = &http.Server{Handler: handler, ErrorLog: log.New(ioutil.Discard, "", 0)}
		go server.Serve(tls.NewListener(listener, tlsConfig))
	}
	up()
	say("listening", *listen)
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt)
	go func() { <-interrupts; model.Remove(); os.Exit(0) }()
	for input := bufio.NewScanner(os.Stdin); input.Scan(); {
		words := append(strings.Fields(input.Text()), "", "", "", "")
		switch words[0] {
		case "at":
			mutex.Lock()
			events[words[1]] = event{words[2], words[3]}
			mutex.Unlock()
		case "go":
			gate <- true
		case "logout":
			logout()
		case "forget":
			mutex.Lock()
			sessions = map[string]bool{}
			mutex.Unlock()
		case "down":
			server.Close()
			logout()
		case "up":
			up()
		case "poweroff":
			powerOff(words[1])
		}
		say("ok")
	}
	model.Remove()
}
